"""One launcher a file, its name is the file's: how the scheduler and the detokenizer come to run."""
