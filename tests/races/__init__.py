"""Waits of streams that are left out, and other planted faults, on the simulated GPU: is each seen?"""
