"""What torch's FSDP1 looked like in each version that fsdp_c runs with: see ``tests.drift.tables``."""
