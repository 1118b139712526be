"""Blind votes of people: one vote, the queue, the data set on the Hub, ratings."""
