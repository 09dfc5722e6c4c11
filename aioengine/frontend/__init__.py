"""The engine in the user's process: what lies between a checked call and the scheduler, and back."""
