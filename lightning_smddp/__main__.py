"""``python -m lightning_smddp`` is ``lightning-smddp``."""

import sys

from lightning_smddp.cli import main

sys.exit(main())
