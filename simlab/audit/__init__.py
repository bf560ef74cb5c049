"""What is wrong with a run, and what each method would do to its tokens. Imports core, stabilizers, study, token_log.

`simlab.audit(batch)` is `audit` of audit.py: the folder and the function share a name, so the folder can be called.
"""

import sys
from types import ModuleType


class _Folder(ModuleType):
    def __call__(self, *args, **options):
        from simlab.audit.audit import audit

        return audit(*args, **options)


sys.modules[__name__].__class__ = _Folder
