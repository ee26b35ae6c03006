"""The parts of convergence.py, which compares training configurations on the same seeds and data.

jobs, configurations --> engines --> run (errors, checkpoints) --> records: a JSON file each --> report, plot
"""
