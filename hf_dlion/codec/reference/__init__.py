"""The definition of every vote and every update in NumPy; all other codecs equal it bit for bit."""
