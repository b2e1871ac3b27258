"""From the import of this module on no garbage is looked for: the first import of the test session and its fork server.

Imports make a million objects and next to no garbage; to look through them each time they have grown takes a fifth of
the time that importing takes.
"""

import gc

gc.disable()
