"""Many runs from one file: sweep.py plans, submits and compares them."""
