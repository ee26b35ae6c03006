"""Deterministic simulation of several ranks in one process, for tests of code that communicates.

In:  a program for each rank, the number of ranks, and a seed.
Out: what each rank returned or raised; the same for the same seed.
Called by: tests; nothing else in the library.
"""

from zcomm.testing.disk import SimulatedDisk
from zcomm.testing.scheduler import Deadlock, Stopped
from zcomm.testing.simulation import Outcome, Simulation

__all__ = ["Deadlock", "Outcome", "SimulatedDisk", "Simulation", "Stopped"]
