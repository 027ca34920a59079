"""Images: the `ImageSet`, decoding, the cache of decoded images, the data sets and their readers."""
