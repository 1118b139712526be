"""Deploys the comparison page as a Space of a Hub."""
