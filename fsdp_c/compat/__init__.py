"""Compatibility with code for torch's FSDP1: its names, stand-ins for a torch without it, ``install()``.

All imports of torch's FSDP1 are in ``upstream``. Each ``_name.py`` defines the names of
``torch.distributed.fsdp._name`` that libraries use, and is ``fsdp_c._name``. Helper modules that are
independent of units are torch's own (``upstream.helpers``). ``handle_names`` has FSDP1's names of handles.
"""
