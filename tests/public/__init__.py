"""Modules of public packages under ``smddp_pipeline``, each against one process: ``make public``.

Each file is a table of cases of one kind. A case makes a LightningModule around what a package offers, written as that
package's documentation shows it; weights are random, data are made here. Not part of ``make test``: the packages of
``requirements.txt`` are installed into an environment of their own, ``.venv-public``.
"""
