"""Reports on a running program: units and their memory, where each rank is, versions and devices."""
