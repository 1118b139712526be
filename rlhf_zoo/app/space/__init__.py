"""The comparison page as a Space of a Hub."""
