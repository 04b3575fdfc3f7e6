"""The model of time: training steps on modelled machines, computed on the simulated GPU (docs/testing.md)."""
