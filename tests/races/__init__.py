"""Omitted stream waits and other planted faults on the simulated GPU, each of which must be detected."""
