"""What the four papers print, computed or simulated here, each number beside the printed one."""
