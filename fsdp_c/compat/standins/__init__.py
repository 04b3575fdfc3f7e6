"""What fsdp_c takes from torch's FSDP1, for a torch without: enums, configurations, wrap policies, helpers.

``fsdp_c.compat.upstream`` decides which of the two is used. With torch's FSDP1 in place nothing here is, so
that the objects of users are torch's own. The classes name torch's modules as theirs: a pickle made with
either loads with the other.
"""
