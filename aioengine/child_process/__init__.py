"""Code that every child process runs: its start, its loop, its settings in the operating system, its logs."""
