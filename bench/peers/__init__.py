"""What people use today, each behind one small adapter, in an environment of its own."""
