"""Training configurations beside one another on the same seeds and data: the parts of convergence.py.

jobs, configurations --> engines --> run (errors, checkpoints) --> records: a JSON file each --> report, plot
"""
