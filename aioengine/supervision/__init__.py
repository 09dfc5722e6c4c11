"""Who starts and watches the processes, and carries messages to and from them. They are named, never imported."""
