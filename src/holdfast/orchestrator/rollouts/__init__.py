"""One problem after another: the sessions of a group, what is sampled for them, and the teacher that judges them."""
