"""Benchmarks. Each is one command that measures fsdp_c, torch's FSDP1 and FSDP2 in the same run."""
