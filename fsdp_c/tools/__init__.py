"""Reports on a running program: units and their memory, progress of each rank, versions and devices."""
