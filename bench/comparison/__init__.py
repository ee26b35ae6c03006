"""The parts of compare.py: records of its runs, tables, and a plot."""
