"""A divided module seen as a whole: tensors whose values are on one rank, and operations that go where the values are.

In hooks and callbacks every rank of a pipeline runs the same code. Within a :class:`~.view.GlobalView` a parameter of
any rank is a :class:`~.global_tensor.GlobalTensor` on all of them. An operation is done by the rank that has the
values; the others learn its result's shape only. A value that Python asks for (``.item()``, ``.numpy()``, a print), or
that an operation on another rank needs, is sent. So code that updates a teacher next to its student sends nothing at
all, and the norm of all gradients is one number a rank.
"""
