"""The network: hosts as namespaces of this machine, links shaped by tc. Imports nothing else of thinpipe."""
