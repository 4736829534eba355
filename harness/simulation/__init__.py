"""A pipeline's step, predicted from profiles, codecs and links, past this machine (docs/simulate.md).

model.py      what goes in and comes out           cells.py     a cell of an experiment as a model
steps.py      the events of a step                 cluster.py   what to run elsewhere
costs.py      codecs and constants, measured       report.py    what `thinpipe simulate` says
wan.py        links between regions
"""
