"""Launchers run the scheduler and the detokenizer. One file per launcher; the file name is its name."""
