"""The values of the user, facts about machine and model, and the settings that follow."""
