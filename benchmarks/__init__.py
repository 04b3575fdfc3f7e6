"""Benchmarks: one command each, always side by side with torch's FSDP1 and FSDP2 in one run."""
