"""Ways to change what a call depends on, between two calls, on the plain module and on ours."""
