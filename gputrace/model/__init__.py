"""Data model that the layers exchange."""
