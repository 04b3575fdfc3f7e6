"""What torch has and lacks: FSDP1's own names, stand-ins for a torch without it, errors for what differs.

``upstream`` is the one place where names of torch's FSDP1 are imported. Nothing here knows of fsdp_c's units.
"""
