"""All that serves code written for torch's FSDP1: its names, stand-ins for a torch without it, ``install()``.

``upstream`` is the one place where names of torch's FSDP1 are imported. Each ``_name.py`` has the names of
``torch.distributed.fsdp._name`` that libraries use, and is ``fsdp_c._name``; of modules that know of no units torch's
own are (``upstream.helpers``). ``handle_names`` has torch's names on handles, ``unit_names`` those on units.
"""
