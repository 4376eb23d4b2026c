"""Which rows run next and which memory they need: pure Python over integers, no torch."""
