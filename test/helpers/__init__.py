"""What test modules share. No test is here, and no test module imports another one."""
