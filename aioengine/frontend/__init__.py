"""The part of the engine in the user's process, between the public classes and the scheduler process."""
