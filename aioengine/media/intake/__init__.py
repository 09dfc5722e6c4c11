"""The images of calls: reading them, and handing them to the media process."""
