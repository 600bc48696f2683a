//! Raw declarations of the C interface of flash-dmattn, exact attention with any mask. The header `flash_dmattn.h` is
//! the manual. The crate `flash-dmattn` is a safe layer over attention on the CPU.
//!
//! `Default` of a struct that begins with `struct_bytes` sets its size and what the header's `*_default()` sets; all
//! else is 0.
#![allow(non_camel_case_types)]

use std::mem::size_of;
use std::os::raw::{c_char, c_int, c_void};

macro_rules! grows {
    ($($name:ident {$($field:ident: $value:expr),*})*) => {$(
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: its members are numbers, raw pointers, and arrays and structs of these.
                let zero = unsafe { std::mem::zeroed() };
                $name { struct_bytes: size_of::<$name>() as u32, $($field: $value,)* ..zero }
            }
        }
    )*};
}

#[rustfmt::skip]
mod bindings;
pub use bindings::*;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, MaybeUninit};
    use std::ptr::addr_of;

    macro_rules! layouts {
        ($($name:ident $size:literal $align:literal {$($field:ident $offset:literal)*})*) => {
            #[test]
            #[cfg(target_pointer_width = "64")]
            fn layout_is_that_of_c() {$(
                assert_eq!((size_of::<$name>(), align_of::<$name>()), ($size, $align), stringify!($name));
                let place = MaybeUninit::<$name>::uninit();
                let _start = place.as_ptr();
                $(
                    // SAFETY: addresses alone are taken, within `place`.
                    let offset = unsafe { addr_of!((*_start).$field) as usize - _start as usize };
                    assert_eq!(offset, $offset, stringify!($name.$field));
                )*
            )*}
        };
    }
    macro_rules! values {
        ($($name:ident $value:literal)*) => {
            #[test]
            fn values_are_those_of_c() {
                $(assert_eq!($name as i64, $value, stringify!($name));)*
            }
        };
    }
    macro_rules! exported {
        ($($name:ident)*) => {
            /// Linking fails where the library lacks one.
            #[test]
            fn the_library_exports_every_function() {
                let functions = [$($name as *const ()),*];
                assert!(functions.iter().all(|function| !function.is_null()));
            }
        };
    }
    include!("layout.rs");

    #[test]
    fn versions_are_equal() {
        // SAFETY: the library's string is constant.
        let loaded = unsafe { std::ffi::CStr::from_ptr(fdm_version()) };
        assert_eq!(loaded.to_str(), Ok(FDM_VERSION));
        assert_eq!(FDM_VERSION, env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn defaults_are_those_of_c() {
        let options = fdm_options::default();
        assert_eq!((options.window_left, options.window_right, options.causal), (-1, -1, 0));
        assert_eq!(options.struct_bytes as usize, std::mem::size_of_val(&options));
    }
}
