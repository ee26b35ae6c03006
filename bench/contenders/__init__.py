"""Ways to train one model on every rank's own batches, ours and its peers', behind the same step.

A module here imports what its way of training needs, and nothing else here imports that: a process that measures memory
loads one of them.
"""
