"""In the place of torch's FSDP1: ``install()``, scripts that are run unmodified, torch's private paths.

Each ``_name.py`` here has the names of ``torch.distributed.fsdp._name`` that libraries use, and is
``fsdp_c._name``; of modules that know of no units torch's own are (``upstream.helpers``).
"""

from fsdp_c.interop.installation import install, is_installed, uninstall
from fsdp_c.interop.scripts import module_exists, run_module, run_script

__all__ = ["install", "is_installed", "module_exists", "run_module", "run_script", "uninstall"]
