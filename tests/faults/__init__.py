"""Faults of a whole job: real processes train, a fault occurs at a random moment, and the job restarts.

definition.py   every fault: what is done, and what must follow
job.py          one rank of the job, with the fault in it
forked.py       the job on forks of a process that has imported everything, started again by hand
elastic.py      the job under torchrun with restarts, also on two emulated machines
__main__.py     many of them: python -m tests.faults --runs 450 --torchrun 50 --results FILE
"""
