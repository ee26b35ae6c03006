"""The parts of compare.py: the records of its runs, the tables and the plot."""
