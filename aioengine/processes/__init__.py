"""What each process runs. Started by ``supervision`` by name, never imported by it."""
