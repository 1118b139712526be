"""The keys of a recipe: declared by dataclasses, checked once, frozen."""
