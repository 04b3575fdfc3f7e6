"""Stand-ins for a torch without FSDP1: enums, configurations, wrap policies, helpers.

Unused while torch has FSDP1 (see ``fsdp_c.compat.upstream``), so that users' objects are torch's own. Each
class has torch's module as its ``__module__``: pickles are interchangeable.
"""
