"""Starts and watches the processes, and passes messages to and from them. It never imports their modules."""
