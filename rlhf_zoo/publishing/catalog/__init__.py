"""Reads the cards of a namespace, and derives its index, lineage, family trees and ablations."""
