"""The exactness suite: what a request is answered does not depend on anything but the request, to the bit."""
