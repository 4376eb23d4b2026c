"""The building blocks of a decoder: linear, norm, rotary, attention, embedding."""
