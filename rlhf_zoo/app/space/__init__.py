"""Deploys the comparison page as a Space on a Hub."""
